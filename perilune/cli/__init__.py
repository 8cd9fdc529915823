"""The command line: `main` dispatches, one small file a verb."""
