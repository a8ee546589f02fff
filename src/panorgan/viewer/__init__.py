"""Looking at scans, labels and predictions in the browser. Nothing here leaves this machine."""
