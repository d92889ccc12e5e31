"""Keep state and put it back: modules, buffers, optimizers, random numbers, gradients, attributes."""
