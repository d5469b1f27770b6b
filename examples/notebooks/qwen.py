# %% [markdown]
# # The shift in your Qwen
#
# `add_kv_shift` gives a pretrained model a KV shift: in every layer, each key and value is mixed with that of the
# previous token, by four learned coefficients per KV head. Initially they change nothing. This notebook adds them
# to a small Qwen3, shows that its outputs remain exactly the same, trains only the coefficients on some text, and looks
# at the result.
#
# In Colab, choose a GPU (Runtime > Change runtime type). On a CPU, training takes much longer.

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
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvshift import param_groups
from kvshift.models.retrofit import add_kv_shift, load_kv_shift
from kvshift_lab.analysis.maps import map_coefficients
from kvshift_lab.data.config import DataConfig
from kvshift_lab.data.sources import load_documents, texts
from kvshift_lab.run.callbacks import coefficients
from kvshift_lab.run.head_scores import measure_heads
from kvshift_lab.run.repeat_config import RepeatConfig

MODEL = "Qwen/Qwen3-0.6B"  # or a Llama, Mistral, Qwen2, Gemma 3, GPT-NeoX, Phi-3 or GPT-2; or a folder
STEPS, ROWS, LENGTH = 60, 4, 256
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown]
# ## Which heads already do induction
#
# Pretrained models have learned to copy, with two layers for each induction head. The induction score, from 0 to 1, is
# the share that the token after the earlier occurrence has in what a head moves, on random tokens that are repeated
# once.

# %%
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager").to(DEVICE)

repeats = RepeatConfig(rows=4, highest_token=len(tokenizer) - 1)
measured = measure_heads(model, repeats)
print(f"repeated tokens that are right: {measured.behaviour['second']['accuracy']:.0%}")
for head in sorted(measured.heads, key=lambda head: -head.scores["induction"])[:8]:
    print(f"layer {head.layer}, head {head.head}: induction {head.scores['induction']:.2f}")

# %% [markdown]
# ## Add the shift

# %%
prompt = tokenizer("The quick brown fox jumps over the lazy dog. The quick", return_tensors="pt").to(DEVICE)
with torch.no_grad():
    before = model(**prompt).logits
    add_kv_shift(model)
    after = model(**prompt).logits
added = sum(parameter.numel() for name, parameter in model.named_parameters() if ".shift." in name)
print(f"{type(model).__name__}: {added:,} coefficients; logits equal to the bit: {torch.equal(before, after)}")

# %% [markdown]
# ## Train only the coefficients
#
# The text is Shakespeare, which comes with kvshift; you can put your own into `text`. Its last tenth is held out.

# %%
text = "\n".join(texts(load_documents(DataConfig())[0]))
tokens = tokenizer(text[: 7 * STEPS * ROWS * LENGTH], return_tensors="pt")["input_ids"][0]
rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
split = len(rows) * 9 // 10
training, held_out = rows[:split], rows[split:][:32]


@torch.no_grad()
def held_out_loss():
    """Return the mean loss on the held-out rows."""
    model.eval()
    losses = [model(part.to(DEVICE), labels=part.to(DEVICE)).loss for part in held_out.split(ROWS)]
    return torch.stack(losses).mean().item()


def train():
    """Train the coefficients and freeze all other parameters."""
    model.train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".shift." in name)
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-2))
    for step in range(STEPS):
        part = training[torch.randint(len(training), (ROWS,))].to(DEVICE)
        loss = model(part, labels=part).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: training loss {loss.item():.3f}")


# %%
torch.manual_seed(0)
untrained = held_out_loss()
train()
print(f"held-out loss: {untrained:.3f} before, {held_out_loss():.3f} after")

# %% [markdown]
# Do not expect a large gain: the model was trained without the shift. In our measurements on SmolLM2-135M, most of
# such a gain came from scaling each head, and copying got worse ([lessons
# learned](https://github.com/kvshift/kvshift/blob/HEAD/docs/lessons.md)). How much a model gains if it is trained with
# the shift from the start is another question, which `kvshift compare` answers for your text.
#
# ## The learned coefficients
#
# In every KV head, alpha and beta started at (1, 0): all of the token itself, and nothing of the previous one.

# %%
map_coefficients(coefficients(model))

# %% [markdown]
# ## Save, load, generate

# %%
model.save_pretrained("model-with-shift")
model = load_kv_shift("model-with-shift").to(DEVICE)
answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)
print(tokenizer.decode(answer[0]))
