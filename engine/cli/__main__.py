"""`python -m vattn.engine.cli`: the `vattn` command."""

from vattn.engine.cli import main

raise SystemExit(main())
