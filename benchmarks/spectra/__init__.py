"""Cost of a Jacobian's singular values, with normscope and with alternatives."""
