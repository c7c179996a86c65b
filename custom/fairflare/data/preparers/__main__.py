from fairflare.data.preparers.common import main

raise SystemExit(main())
