"""Verifying drafted tokens and packing the KV of those accepted, on a GPU: studies/verification/README.md.

python -m studies.verification.bench --output verify.json
python -m studies.verification.plot verify.json -o studies/verification/images
"""
