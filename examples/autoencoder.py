"""A Lightning autoencoder: 1,797 handwritten digits of 64 pixels each, squeezed into 6 numbers and drawn again. The
module and its data are Lightning's; only wide.run stands where `Trainer(…).fit(module, data)` would.

    pip install 'wiiiiide[lightning,examples]'
"""

import lightning
import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import wide

SHADES = " .:-=+*#%@"


class Digits(lightning.LightningDataModule):
    def __init__(self, batch_size=64):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        images = torch.tensor(load_digits().data / 16.0, dtype=torch.float32)
        self.train, self.held_out = random_split(TensorDataset(images), [1437, 360], torch.Generator().manual_seed(1))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.held_out, batch_size=360)


class Autoencoder(lightning.LightningModule):
    def __init__(self, code=6, lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, code))
        self.decoder = nn.Sequential(nn.Linear(code, 48), nn.ReLU(), nn.Linear(48, 64), nn.Sigmoid())

    def forward(self, images):
        return self.decoder(self.encoder(images))

    def training_step(self, batch, batch_idx):
        (images,) = batch
        loss = F.mse_loss(self(images), images)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        (images,) = batch
        self.log("val_loss", F.mse_loss(self(images), images), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2 * self.hparams.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def drawn(image):
    rows = (image * (len(SHADES) - 1)).round().int().view(8, 8).tolist()
    return ["".join(2 * SHADES[shade] for shade in row) for row in rows]


if __name__ == "__main__":
    lightning.seed_everything(0)
    module, data = Autoencoder(), Digits()
    result = wide.run(wide.lightning.job(module, data, epochs=40), nodes=2)
    print(result.summary())

    again = Autoencoder.load_from_checkpoint(f"{result.run_dir}/model.ckpt").eval()
    data.setup("fit")
    images = torch.stack([data.held_out[i][0] for i in range(4)])
    with torch.no_grad():
        redrawn = again(images)
    print("\nFour digits that it never saw; below, what is left of them after 6 numbers:\n")
    for line in zip(*map(drawn, images), strict=True):
        print("   ".join(line))
    print()
    for line in zip(*map(drawn, redrawn), strict=True):
        print("   ".join(line))
