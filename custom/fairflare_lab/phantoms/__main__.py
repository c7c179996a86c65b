from fairflare_lab.phantoms.sheet import main

if __name__ == "__main__":
    raise SystemExit(main())
