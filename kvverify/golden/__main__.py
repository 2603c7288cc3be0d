"""`python -m kvverify.golden`: the golden store's command where torch is not installed."""

from kvverify.golden.commands import main

main()
