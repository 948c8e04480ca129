"""Train a small module on a text, and sample from it between steps without exporting or copying the model.

    python examples/train_and_sample.py                      # trains on this file, for 20 seconds
    python examples/train_and_sample.py story.txt --seconds 120

The module is plain PyTorch. Called without a cache, it is the training forward; with a cache, it decodes.
`onward.Model.from_module` turns it into a model for all of Onward. docs/tutorials/train-and-decode.md explains it.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import onward

BYTES = 256


class Block(nn.Module):
    """Pre-norm attention and feed-forward; x [B, T, D]."""

    def __init__(self, index: int, width: int, heads: int) -> None:
        super().__init__()
        self.index, self.heads = index, heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, offsets: Tensor, cache: onward.KVCache | None) -> Tensor:
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, 2))
        if cache is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            # Write at each row's own positions and attend up to them: entries past them are never read.
            mixed = cache.attend(self.index, q, k, v, offsets)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class ByteModel(nn.Module):
    """A language model over bytes: tokens [B, T], offsets [B] -> logits [B, T, 256]."""

    vocab_size = BYTES

    def __init__(self, width: int = 128, layers: int = 3, heads: int = 4, max_seq_len: int = 512) -> None:
        super().__init__()
        self.max_seq_len, self.heads = max_seq_len, heads
        self.tokens, self.positions = nn.Embedding(BYTES, width), nn.Embedding(max_seq_len, width)
        self.blocks = nn.ModuleList(Block(index, width, heads) for index in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES)

    def forward(
        self, tokens: Tensor, offsets: Tensor, cache: onward.KVCache | None = None
    ) -> tuple[Tensor, onward.KVCache | None]:
        at = offsets[:, None] + torch.arange(tokens.shape[1])
        # A short row's padding may run past the last position: `clamp` keeps the lookup valid, its result is not read.
        x = self.tokens(tokens) + self.positions(at.clamp(max=self.max_seq_len - 1))
        for block in self.blocks:
            x = block(x, offsets, cache)
        return self.head(self.norm(x)), cache

    def new_cache(self, batch: int, max_len: int) -> onward.KVCache:
        weight = self.tokens.weight
        return onward.KVCache.new(
            num_layers=len(self.blocks),
            batch=batch,
            num_kv_heads=self.heads,
            max_len=max_len,
            head_dim=weight.shape[1] // self.heads,
            dtype=weight.dtype,
            device=weight.device,
        )


def train(
    text: bytes, seconds: float, *, max_steps: int = 10**9, sample_every: float = 5.0, context: int = 128
) -> float:
    """Train for `seconds`, printing a sample every `sample_every` seconds. Returns the loss of the last step."""
    torch.manual_seed(0)
    module = ByteModel()
    model = onward.Model.from_module(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    data = torch.tensor(list(text), dtype=torch.int64)
    began = sampled = time.monotonic()
    for step in range(max_steps):
        starts = torch.randint(0, len(data) - context, (16,))
        batch = torch.stack([data[start : start + context + 1] for start in starts])
        logits, _ = module(batch[:, :-1], torch.zeros(16, dtype=torch.int32))
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now = time.monotonic()
        last = step + 1 == max_steps or now - began >= seconds
        if last or now - sampled >= sample_every:
            # The model uses the weights of this step. Dropout is off while decoding, and on again afterwards.
            prompt = data[:16].unsqueeze(0)
            ids = onward.generate(model, prompt, 100, temperature=0.7, seed=step)
            print(f"── step {step}, loss {loss.item():.3f}\n{bytes(ids[0].tolist()).decode('utf-8', 'replace')}")
            sampled = time.monotonic()
        if last:
            break
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small module on a text, and sample from it.")
    parser.add_argument(
        "text", nargs="?", type=Path, default=Path(__file__), help="a file of 1 kB or more (default: this)"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to train (default: 20)")
    arguments = parser.parse_args()
    train(arguments.text.read_bytes(), arguments.seconds)


if __name__ == "__main__":
    main()
