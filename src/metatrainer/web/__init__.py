"""The live page: what a ledger holds, as pages in a browser. Reads only."""
