"""What benchmarks share: discovery, reports, timing, models and queues to run, records, tables and plots."""
