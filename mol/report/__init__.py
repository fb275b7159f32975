"""Reported against reproduced: verdicts, tables, figures, the page and the audit."""
