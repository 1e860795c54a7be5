"""The paper's experiments on CIFAR-10: training, the comparison, and what each stage costs."""
