"""Verifying drafted tokens and packing the KV of those accepted, on a GPU: docs/verification.md.

python -m studies.verification.bench --output verify.json
python -m studies.verification.plot verify.json -o docs/images
"""
