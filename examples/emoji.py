"""A small GPT that invents emoji. It learns, word by word, the names of those that exist, which are part of Python
(unicodedata): no download.
"""

import unicodedata
from collections import Counter
from functools import cache

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import wide

LONGEST, WIDTH, HEADS = 8, 64, 4  # words in a name, with an end; numbers for each word; heads
PICTURES = [*range(0x1F300, 0x1F650), *range(0x1F680, 0x1F6FD), *range(0x1F900, 0x1FA00), *range(0x1FA70, 0x1FAFA)]
END = "."


@cache
def names() -> list[list[str]]:
    """Those of several words, at least one of which is in another name, too."""
    found = sorted({unicodedata.name(chr(code), "").lower() for code in PICTURES})
    uses = Counter(word for name in found for word in name.split())
    split = [name.split() for name in found]
    return [words for words in split if 1 < len(words) < LONGEST and any(uses[word] > 1 for word in words)]


@cache
def vocabulary() -> list[str]:
    return [END, *sorted({word for words in names() for word in words})]


def lines() -> torch.Tensor:  # (names, LONGEST + 1)
    """One line for each name, between two ends; what comes after is ends, too."""
    places = {word: i for i, word in enumerate(vocabulary())}
    padded = [[END, *words, *[END] * (LONGEST - len(words))] for words in names()]
    return torch.tensor([[places[word] for word in words] for words in padded])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.to_qkv, self.to_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, time, width)
        batch, time, _ = x.shape
        heads = self.to_qkv(self.norm_1(x)).view(batch, time, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.to_out(attended.transpose(1, 2).reshape(batch, time, WIDTH))
        return x + self.think(self.norm_2(x))


class WordGpt(nn.Module):
    """Two blocks between an embedding and a read-out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(len(vocabulary()), WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.read_out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(vocabulary()))

    def forward(self, words: torch.Tensor) -> torch.Tensor:  # (batch, time) -> (batch, time, vocabulary)
        x = self.words(words) + self.places.weight[: words.shape[1]]
        return self.read_out(self.norm(self.blocks(x)))


def next_word_loss(model: nn.Module, lines: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(lines[:, :-1]).flatten(0, 1), lines[:, 1:].flatten())


def invent(model: nn.Module, count: int, boldness: float = 0.9) -> list[str]:
    """Names that the model has made up: none of them exists."""
    generator, known, invented = torch.Generator().manual_seed(4), {" ".join(words) for words in names()}, []
    model.eval()
    with torch.no_grad():
        while len(invented) < count:
            written = [0]
            while len(written) == 1 or (written[-1] != 0 and len(written) < LONGEST):
                chances = F.softmax(model(torch.tensor([written]))[0, -1] / boldness, dim=0)
                written.append(int(torch.multinomial(chances, 1, generator=generator)))
            words = [vocabulary()[i] for i in written[1:-1]]
            name = " ".join(words)
            if len(words) > 1 and written[-1] == 0 and name not in known:
                known.add(name)
                invented.append(name)
    return invented


job = wide.Job(
    model=WordGpt,
    dataset=lines,
    loss=next_word_loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=400),
    batch_size=32,
    batches_per_step=4,
    steps=400,
    clip_norm=1.0,
)

if __name__ == "__main__":
    print("A small GPT learns the names of all emoji, on 4 node processes. About half a minute.")
    result = wide.run(job, nodes=4)
    print("\nEmoji that do not exist:\n")
    for name in invent(result.model, 16):
        print(f"    {name}")
    print(f"\n{result.summary()}")
    print("The same bits, from one process and a plain loop:  .venv/bin/wide run examples/emoji.py --nodes 0")
