"""Makes the base model of a config and prints its folder.

python launch/warmstart.py --config=configs/quickstart.py [--config.FIELD=VALUE ...]

The folder is an ordinary Hugging Face model, to be used by --config.model.path=FOLDER. A second call with the same config finds it
in the cache.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxprorl import streams

if __name__ == "__main__":
    streams.protect(streams.READ_WITHIN_S)  # before any file is opened

from jaxprorl import config as config_module
from jaxprorl.errors import UserError


def main(argv: list[str]) -> int:
    """Exit status: 0 done, 2 bad input (one line on stderr)."""
    try:
        config = config_module.load(argv)
        config_module.validate(config)
        from jaxprorl.model_cache import base_model, check_cache
        from jaxprorl.monitoring.progress import Progress
        from jaxprorl.preemption import Preemption
        from jaxprorl.sizes import with_cpu_devices
        from jaxprorl.start import prepare_devices

        config = with_cpu_devices(config)  # as a run does: the cache tells models apart by it
        check_cache(config)
        mesh = prepare_devices(config)
        with Preemption(), Progress(0, config.monitoring.progress) as progress:
            folder, cached = base_model(config, mesh, progress)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{folder}{' (from the cache)' if cached else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
