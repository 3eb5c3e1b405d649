"""A GAN on scikit-learn's digits, in the loop it was written in: two models, two optimizers, data of its own. Each node
trains both by itself; every 25 steps the pool averages them.

    wide run examples/gan.py --nodes 3
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

import wide

NOISE, STEPS, BATCH = 32, 2000, 64


def distance(fake: torch.Tensor, real: torch.Tensor) -> float:
    """Fréchet's, between two clouds of images: 0 if they have one mean and one covariance."""
    mean = (fake.mean(0) - real.mean(0)).square().sum()
    a, b = torch.cov(fake.double().T), torch.cov(real.double().T)
    root = torch.linalg.eigvals(a @ b).sqrt().real.sum()
    return float(mean + a.trace() + b.trace() - 2 * root)


def main() -> None:
    torch.manual_seed(0)
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    generator = nn.Sequential(
        *(nn.Linear(NOISE, 128), nn.BatchNorm1d(128), nn.ReLU()),
        *(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh()),
    )
    critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    of_critic = torch.optim.Adam(critic.parameters(), lr=5e-4, betas=(0.5, 0.99))
    of_generator = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.99))
    judge = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)

    shuffled = images[:, torch.randperm(64)]

    @torch.no_grad()
    def score() -> str:
        """How far off the generator is, and how often the critic prefers a digit to itself with shuffled pixels."""
        away = distance(generator.eval()(torch.randn(2000, NOISE)), images)
        generator.train()
        return f"distance {away:.2f}, critic right {(critic(images) > critic(shuffled)).float().mean():.0%}"

    before = score()
    with wide.local({"generator": generator, "critic": critic}, [of_critic, of_generator], every=25) as pool:
        for _ in range(STEPS):
            real = images[torch.randint(len(images), (BATCH,))]
            fake = generator(torch.randn(BATCH, NOISE))

            said = judge(critic(real), ones) + judge(critic(fake.detach()), zeros)
            of_critic.zero_grad()
            said.backward()
            of_critic.step()

            loss = judge(critic(fake), ones)
            of_generator.zero_grad()
            loss.backward()
            wide.log(loss=loss, critic=said)
            of_generator.step()
    print(f"node {pool.node}: {before} -> {score()}", flush=True)


if __name__ == "__main__":
    main()
