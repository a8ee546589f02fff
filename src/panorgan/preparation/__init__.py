"""From cases to training patches: plan, preprocessing, store, sampling, augmentation."""
