"""What is optimised: one problem a file, with its data, exact objective and formulations."""
