"""`python -m oktopk.cli`: what launchers start on every rank."""

import sys

from oktopk.cli.main import main

sys.exit(main())
