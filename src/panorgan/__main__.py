"""`python -m panorgan` is `panorgan`."""

from panorgan.cli.main import main

if __name__ == "__main__":
    main()
