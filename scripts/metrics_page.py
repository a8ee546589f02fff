"""Print docs/metrics.md as the registry of metrics has it."""

from panorgan.report.metrics_page import metrics_page

if __name__ == "__main__":
    print(metrics_page(), end="")
