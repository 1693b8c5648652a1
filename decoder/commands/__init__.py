"""The commands of `decoder`: each parses, makes one library call, renders. Models are imported when a command runs."""
