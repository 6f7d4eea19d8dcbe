"""Reports: one self-contained HTML file, with figures that are readable on a phone, in the dark, on paper and by ear."""
