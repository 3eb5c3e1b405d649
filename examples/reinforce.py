"""REINFORCE in a loop of its own: a policy learns to catch a falling ball. Each node plays games by itself; every 20
updates the pool averages what the nodes have learned.

    wide run examples/reinforce.py --nodes 3
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributions import Categorical

import wide

WIDTH, HEIGHT, GAMES, UPDATES = 9, 8, 64, 300


def play(policy: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Many games at once: the log-probability of what was done in each, and whether the ball was caught."""
    ball, drift = torch.randint(WIDTH, (GAMES,)), torch.randint(-1, 2, (GAMES,))
    paddle = torch.full((GAMES,), WIDTH // 2)
    likelihood = torch.zeros(GAMES)
    for height in range(HEIGHT, 0, -1):
        seen = torch.stack((ball - paddle, ball, 3 * drift, torch.full((GAMES,), height)), 1) / 4
        chosen = Categorical(logits=policy(seen))
        move = chosen.sample()
        likelihood = likelihood + chosen.log_prob(move)
        paddle = (paddle + move - 1).clamp(0, WIDTH - 1)
        ball = (ball + drift).clamp(0, WIDTH - 1)
    return likelihood, (ball == paddle).float()


def main() -> None:
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    def rate() -> float:
        with torch.no_grad():
            return float(torch.stack([play(policy)[1].mean() for _ in range(20)]).mean())

    before, usual = rate(), 0.0
    with wide.local(policy, optimizer, every=20) as pool:
        for _ in range(UPDATES):
            likelihood, caught = play(policy)
            loss = -(likelihood * (caught - usual)).mean()
            usual += 0.1 * (float(caught.mean()) - usual)
            optimizer.zero_grad()
            loss.backward()
            wide.log(loss=loss, caught=caught.mean())
            optimizer.step()
    print(f"node {pool.node}: catches {before:.0%} -> {rate():.0%} of the balls", flush=True)


if __name__ == "__main__":
    main()
