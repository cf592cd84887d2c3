"""What will run: the problem, the kernel and its tiles, what is prepared or copied before."""
