"""What a step of the scheduler costs at a GPU's pace, measured without a GPU."""
