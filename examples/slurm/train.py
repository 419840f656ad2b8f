"""Handwritten digits on the nodes that SLURM gives: see train.sbatch."""

import os

from lightning.pytorch import Trainer, seed_everything

from lightning_dp import SafeRequeue
from lightning_dp.demo.convnet import DigitsNet
from lightning_dp.demo.digits import DigitsDataModule

if __name__ == "__main__":
    seed_everything(0, verbose=False)
    # By job id, which a requeued job keeps.
    folder = f"runs/{os.environ['SLURM_JOB_ID']}"
    requeue = SafeRequeue(folder)
    trainer = Trainer(
        strategy="bucketed_ddp",
        num_nodes=int(os.environ["SLURM_NNODES"]),
        devices=int(os.environ["SLURM_NTASKS_PER_NODE"]),
        accelerator="cpu",
        max_epochs=2,
        callbacks=[requeue],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(DigitsNet(), DigitsDataModule(), ckpt_path=requeue.checkpoint)
    if trainer.is_global_zero:
        print(f"{trainer.world_size} ranks took {trainer.global_step} steps")
