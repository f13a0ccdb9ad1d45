"""`python -m vattn.engine.cli`: the `vattn` command."""

from . import main

raise SystemExit(main())
