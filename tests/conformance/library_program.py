"""One rank of a program that trains by a library; `libraries` starts it.

    library_program.py [--replace-ddp] NAME OUTPUT

NAME is `trainer`, `lightning`, or a script of accelerate.test_utils.scripts. The first two write the parameters that rank 0 has
at the end, and the class of the wrapper, into OUTPUT.
"""

import runpy
import sys
import tempfile

import torch
from torch import nn

OPTIONS = {"learning_rate": 1e-3, "seed": 3}


def save(output: str, wrapper: object, module: nn.Module) -> None:
    name = f"{type(wrapper).__module__}.{type(wrapper).__qualname__}"
    assert isinstance(wrapper, nn.parallel.DistributedDataParallel), name
    if torch.distributed.get_rank() == 0:
        torch.save({"wrapper": name, "parameters": [parameter.detach() for parameter in module.parameters()]}, output)


class Tokens(torch.utils.data.Dataset):
    """Random sequences of tokens; the labels are the tokens themselves."""

    def __len__(self) -> int:
        return 50  # the last batch is smaller

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 99, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def trainer(output: str) -> None:
    """A transformers.Trainer that accumulates gradients, evaluates, and saves and resumes from a checkpoint."""
    import transformers

    transformers.set_seed(OPTIONS["seed"])
    config = transformers.GPT2Config(vocab_size=99, n_positions=32, n_embd=32, n_layer=2, n_head=2, attn_pdrop=0.0, embd_pdrop=0.0,
                                     resid_pdrop=0.0)
    with tempfile.TemporaryDirectory() as own:
        given = [own]
        torch.distributed.init_process_group("gloo")
        torch.distributed.broadcast_object_list(given, 0)

        def make(epochs: int) -> transformers.Trainer:
            arguments = transformers.TrainingArguments(
                given[0], use_cpu=True, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=epochs,
                learning_rate=OPTIONS["learning_rate"], lr_scheduler_type="constant", eval_strategy="epoch", save_strategy="epoch",
                report_to=[], disable_tqdm=True, seed=OPTIONS["seed"])
            return transformers.Trainer(transformers.GPT2LMHeadModel(config), arguments, train_dataset=Tokens(), eval_dataset=Tokens())

        first = make(1)
        first.train()
        first.train()  # wraps the model again
        resumed = make(3)
        resumed.train(resume_from_checkpoint=True)
        save(output, resumed.model_wrapped, resumed.model)
        torch.distributed.barrier()


def lightning(output: str) -> None:
    """A lightning.Trainer with the strategy ddp: automatic optimization, then manual optimization of two losses."""
    import lightning

    class Automatic(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(12, 200), nn.BatchNorm1d(200), nn.Tanh(), nn.Linear(200, 300), nn.Linear(300, 1))

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return self.body(batch[0]).pow(2).mean()

        def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
            self.log("validation", self.body(batch[0]).pow(2).mean(), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), OPTIONS["learning_rate"])

    class Manual(Automatic):
        automatic_optimization = False

        def training_step(self, batch: list[torch.Tensor], _: int) -> None:
            optimizer = self.optimizers()
            for sign in (1, -1):
                optimizer.zero_grad()
                self.manual_backward(self.body(batch[0] * sign).pow(2).mean())
                optimizer.step()

    class Remember(lightning.Callback):
        def on_train_end(self, trainer: lightning.Trainer, _: lightning.LightningModule) -> None:
            wrappers.append(trainer.strategy.model)

    modules, wrappers = [], []
    for kind in (Automatic, Manual):
        lightning.seed_everything(OPTIONS["seed"], verbose=False)
        data = torch.utils.data.TensorDataset(torch.randn(52, 12))
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        module = kind()
        accumulation = 2 if kind is Automatic else 1
        fit = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, accumulate_grad_batches=accumulation,
                                logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                                callbacks=[Remember()])
        fit.fit(module, loader, loader)
        modules.append(module)
    save(output, wrappers[1], nn.ModuleList(modules))


def main() -> None:
    torch.set_num_threads(1)
    arguments = sys.argv[1:]
    if arguments[0] == "--replace-ddp":
        import paceline

        paceline.replace_ddp()
        del arguments[0]
    name, output = arguments
    if name in ("trainer", "lightning"):
        globals()[name](output)
    else:
        sys.argv[1:] = []
        runpy.run_module(f"accelerate.test_utils.scripts.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
