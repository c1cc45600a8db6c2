"""Files that are there whole or not at all."""

import threading

from ddtree_jax.files import write_whole


def test_writers_of_one_file_do_not_meet(tmp_path):
    """Whoever reads meanwhile finds one text or the other, never a part, and nothing stays behind."""
    file = tmp_path / "table.json"
    texts = [letter * 5000 for letter in (b"a", b"b")]
    write_whole(file, texts[0])
    errors = []

    def write(text):
        try:
            for _ in range(200):
                write_whole(file, text)
        except OSError as error:
            errors.append(error)

    writers = [threading.Thread(target=write, args=(text,)) for text in texts]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert file.read_bytes() in texts
    assert not errors and [p.name for p in tmp_path.iterdir()] == ["table.json"]
