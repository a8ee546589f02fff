"""The page that a run leaves behind: figures, tables and overlays in one HTML file."""

from panorgan.report.page import write_report

__all__ = ["write_report"]
