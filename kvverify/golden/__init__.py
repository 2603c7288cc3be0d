"""The golden store: what the models and policies of this repository computed, kept, checked and changed on purpose.

Theory of operation
-------------------
Three tiers, each checked against the next:

    golden/data/<stage>/<model>.safetensors    the tensors; outputs of DVC stages, not in git
    golden/manifest.json                       one record per file and tensor, and what it was computed with; in git
    golden/updates.json                        why the manifest is what it is: a chain of recorded reasons; in git

DVC keeps the tensors in a remote, by default the folder golden/store of this repository, and dvc.lock names the content
of every output. DVC answers "is this the output of that code"; it exits 0 on stale and on corrupt data, so the manifest
answers "are these the bytes that were reviewed", with SHA-256 and without DVC or torch.

    files      a safetensors file as tensors of bytes, bfloat16 included
    records    what the manifest keeps of a tensor: shape, dtype, hash, mean, rms, largest, first values
    manifest   the manifest of a tree
    history    the chain of recorded reasons
    tree       where things lie, and writing in one step
    pipeline   the stages as dvc.yaml and dvc.lock describe them: which are stale, and why
    remote     the objects of the embedded store, and DVC's own commands
    faults     one fault as one line: where, what, and the command
    verify     every fault of a tree, with the command that mends it
    compare    two tensors: equal, drifted within budget, or changed
    regenerate stages run in a shadow of the tree, which never touches the data
    diff       what regenerating would change
    exchange   replacing several files so that a killed process can be undone
    update     write what was regenerated, for a reason
    rebuild    is a difference the code's or the platform's
    page       a diff as one HTML page

`python -m kvverify.golden verify` needs neither torch nor a model; `kvverify golden` is the same command. After an
update, verify: an update always exits 10.
"""
