"""The command line: text and JSON in and out, and nothing that the library does not do."""
