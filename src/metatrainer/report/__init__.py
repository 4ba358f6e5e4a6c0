"""Figures, tables and numbers of a run, made from its ledger alone."""
