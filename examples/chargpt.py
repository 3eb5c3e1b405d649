"""A small character GPT that learns to write Python, from the standard library's own source: no download."""

import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import wide

CONTEXT = 64
WIDTH = 96
TEXT_CHARACTERS = 1_000_000
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))  # printable ASCII; anything else becomes a space


@cache
def text() -> torch.Tensor:  # (characters,) int64
    """The first million characters of the standard library, its larger modules in alphabetical order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    source, place = "", {character: i for i, character in enumerate(ALPHABET)}
    for path in sorted(folder.glob("*.py")):
        if path.stat().st_size > 20_000:
            source += path.read_text(encoding="utf-8", errors="replace")
        if len(source) >= TEXT_CHARACTERS:
            break
    return torch.tensor([place.get(character, place[" "]) for character in source[:TEXT_CHARACTERS]])


def windows() -> torch.Tensor:
    """Every window of CONTEXT + 1 characters in the first nine tenths: a view of the one tensor, nothing is copied."""
    training = text()[: TEXT_CHARACTERS * 9 // 10]
    return training.unfold(0, CONTEXT + 1, CONTEXT // 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.to_qkv, self.to_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, time, width)
        batch, time, _ = x.shape
        heads = self.to_qkv(self.norm_1(x)).view(batch, time, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.to_out(attended.transpose(1, 2).reshape(batch, time, WIDTH))
        return x + self.think(self.norm_2(x))


class CharGpt(nn.Module):
    """Two blocks; the embedding and the output layer share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(len(ALPHABET), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.read_out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(ALPHABET), bias=False)
        nn.init.normal_(self.characters.weight, std=0.05)
        self.read_out.weight = self.characters.weight

    def forward(self, characters: torch.Tensor) -> torch.Tensor:  # (batch, time) -> (batch, time, alphabet)
        x = self.characters(characters) + self.places.weight[: characters.shape[1]]
        return self.read_out(self.norm(self.blocks(x)))


def next_character_loss(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def held_out(model: nn.Module) -> dict[str, float]:
    unseen = text()[TEXT_CHARACTERS * 9 // 10 :].unfold(0, CONTEXT + 1, CONTEXT + 1)[:512]
    with torch.no_grad():
        return {"held_out_loss": next_character_loss(model, unseen).item()}


def write(model: nn.Module, beginning: str, length: int, seed: int = 0) -> str:
    """Let the model go on, one character at a time, a little bolder than it dares by itself."""
    generator, written = torch.Generator().manual_seed(seed), [ALPHABET.index(c) for c in beginning]
    model.eval()
    with torch.no_grad():
        for _ in range(length):
            logits = model(torch.tensor([written[-CONTEXT:]]))[0, -1]
            written.append(int(torch.multinomial(F.softmax(logits / 0.6, dim=0), 1, generator=generator)))
    return "".join(ALPHABET[i] for i in written)


job = wide.Job(
    model=CharGpt,
    dataset=windows,
    loss=next_character_loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=800),
    batch_size=32,
    batches_per_step=4,
    steps=800,
    evaluate=held_out,
    clip_norm=1.0,
)

if __name__ == "__main__":
    result = wide.run(job, nodes=4)
    print(write(result.model, "def ", 400))
    print(f"\n{result.summary()}")
