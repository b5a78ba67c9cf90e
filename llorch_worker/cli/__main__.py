"""``python -m llorch_worker.cli`` is ``llorch``."""

from llorch_worker.cli import main

if __name__ == "__main__":
    main()
