"""One layer learns induction: having seen `a b`, it answers the next `a` with `b`. Plain attention needs two layers.

python examples/tiny_gpt.py STEPS      for example: python examples/tiny_gpt.py 100 (takes five seconds)
"""

import argparse

import torch
from torch import nn

from kvshift import KVShiftAttention, ShiftOptions, param_groups


class TinyGPT(nn.Module):
    """A language model of an embedding, one attention layer and an output layer."""

    def __init__(self, vocabulary=64, width=64, **options):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.attention = KVShiftAttention(width, num_heads=4, **options)

    def forward(self, tokens, state=None):
        x = self.embed(tokens)
        attended, state = self.attention(x, state=state)
        return self.head(x + attended), state


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("steps", metavar="STEPS", type=int, help="of training, 100 or more")
steps = parser.parse_args().steps

for targets in ((), ("k", "v")):  # plain attention, then KV shift
    torch.manual_seed(0)
    model = TinyGPT(shift_options=ShiftOptions(targets=targets))
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-2))
    for step in range(1, steps + 1):
        period = torch.randint(8, 25, (64, 1))  # each row repeats random tokens with its own period
        tokens = torch.rand(64, 64).argsort(dim=1).gather(1, torch.arange(48) % period)
        logits, _ = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            accuracy = (logits[:, 24:].argmax(-1) == tokens[:, 25:]).float().mean()
            print(f"shift {targets}: step {step}, loss {loss:.2f}, accuracy on repeats {accuracy:.2f}")

tokens, state, answer = torch.tensor([[11, 5, 42, 7, 30, 11]]), None, []
with torch.no_grad():
    while len(answer) < 9:
        logits, state = model(tokens, state)  # first the prompt, then one token at a time
        tokens = logits[:, -1:].argmax(-1)
        answer.append(tokens.item())
print("11 5 42 7 30 11 continues with", *answer)
