"""Models with our ops in the files of other compilers and runtimes."""
