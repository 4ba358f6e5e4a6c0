"""Students: which base models there are, and how well one does on a hidden evaluation."""
