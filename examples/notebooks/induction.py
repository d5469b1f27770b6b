# %% [markdown]
# # Induction in five minutes
#
# Having seen `a b`, a language model answers the next `a` with `b`. The attention heads that do this are called
# induction heads, and plain attention needs two layers for one. With KV shift, every key also contains a part of the
# previous key, and every value a part of the previous value:
#
#     k_hat[t] = alpha1 * k[t] + alpha2 * k[t-1]        v_hat[t] = beta1 * v[t] + beta2 * v[t-1]
#
# One layer is then enough. This notebook trains one layer without the shift and one with it, looks at their heads,
# and turns the shift off again. A CPU is enough.

# %%
import importlib.util
import subprocess
import sys
from pathlib import Path

if importlib.util.find_spec("kvshift_lab") is None:  # takes some minutes
    source = "git+https://github.com/kvshift/kvshift"
    packages = [f"kvshift @ {source}", f"kvshift-lab @ {source}#subdirectory=lab"]
    clone = Path("../..").resolve()  # Jupyter starts a notebook in its folder
    if (clone / "lab/pyproject.toml").is_file():
        packages = [str(clone), str(clone / "lab")]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *packages], check=True)

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import torch

from kvshift import param_groups
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift_lab.analysis.maps import map_attention, map_coefficients
from kvshift_lab.run.callbacks import coefficients
from kvshift_lab.run.head_scores import attention_maps, measure_heads
from kvshift_lab.run.repeat_config import RepeatConfig

STEPS = 150
VOCABULARY = 64

# %% [markdown]
# ## Two models and one task
#
# The models are Llamas of one layer with four heads. They differ only in 16 coefficients: four per head. Each sequence
# repeats random tokens, so only a model that copies can predict the next token.


# %%
def make_model(targets):
    """Return a Llama of one layer that shifts `targets`: keys ("k"), values ("v"), both or neither."""
    torch.manual_seed(0)
    config = KVShiftLlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        shift_targets=targets,
        attn_implementation="eager",  # eager attention returns its probabilities
    )
    return KVShiftLlamaForCausalLM(config)


def repeated_tokens(rows, length=48):
    """Return tokens (rows, length); each row repeats random tokens with a period between 8 and 24."""
    period = torch.randint(8, 25, (rows, 1))
    return torch.rand(rows, VOCABULARY).argsort(dim=1).gather(1, torch.arange(length) % period)


@torch.no_grad()
def accuracy(model):
    """Return the share of repeated tokens that the model predicts correctly."""
    torch.manual_seed(1)
    tokens = repeated_tokens(256)
    return (model(tokens).logits[:, 24:-1].argmax(-1) == tokens[:, 25:]).float().mean().item()


def train(model):
    """Train the model for `STEPS` steps and return the losses."""
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-2))
    losses = []
    for _ in range(STEPS):
        tokens = repeated_tokens(64)
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %%
models = {"without shift": make_model(()), "with KV shift": make_model(("k", "v"))}
for name, model in models.items():
    plt.plot(train(model), label=name)
    print(f"{name}: {accuracy(model):.0%} of the repeated tokens are right")
plt.xlabel("step")
plt.ylabel("loss (nats per token)")
plt.legend()
plt.show()

# %% [markdown]
# ## What the heads attend to
#
# The model with shift reads ten random tokens twice. Each panel shows one of its heads, with a row for each position
# that is dark where the head attends. An induction head attends to the token *after* the earlier occurrence of the
# current token: a diagonal line, one place to the right of the earlier occurrence itself.

# %%
shifted = models["with KV shift"]
once = torch.randperm(VOCABULARY)[:10]
heads = [(0, head) for head in range(4)]
maps = attention_maps(shifted, torch.cat([once, once]), heads)
map_attention([one.numpy() for one in maps], [f"head {head}" for _, head in heads], repeat=10)

# %% [markdown]
# The induction score, from 0 to 1, is the share that the token after the earlier occurrence has in what a head moves.
# `kvshift analyze` reports the same score.

# %%
repeats = RepeatConfig(rows=16, length=16)
for name, model in models.items():
    scores = [head.scores["induction"] for head in measure_heads(model, repeats).heads]
    print(f"{name}: induction {', '.join(f'{score:.2f}' for score in scores)}")

# %% [markdown]
# ## Why one layer is enough
#
# These are the learned coefficients. In an induction head, alpha 2 is large: the key of `b` contains the previous `a`,
# so the next `a` attends to it and receives the value of `b`.

# %%
map_coefficients(coefficients(shifted))

# %% [markdown]
# Without the part of the previous key, the model no longer copies:

# %%
shift = shifted.model.layers[0].self_attn.shift
learned = shift.alpha.detach().clone()
for part in (1.0, 0.5, 0.0):
    with torch.no_grad():
        shift.alpha[:, 1] = part * learned[:, 1]
    print(f"alpha 2 times {part}: {accuracy(shifted):.0%} of the repeated tokens are right")
