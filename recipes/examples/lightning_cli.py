"""LightningCLI: the callback is three lines of YAML, and no code.

python recipes/examples/lightning_cli.py fit --config recipes/examples/lightning_cli.yaml
"""

from collections.abc import Sequence

from lightning.pytorch.cli import LightningCLI
from lightning_module import Classifier, Images


def main(arguments: Sequence[str] | None = None) -> LightningCLI:
    """Runs what the command line says."""
    return LightningCLI(Classifier, Images, args=None if arguments is None else list(arguments))


if __name__ == "__main__":
    main()
