from headrace.hooks.errors import MAX_MESSAGE, BadRequest, RequestFailed


def test_a_message_that_quotes_a_client_is_of_bounded_length() -> None:
    message = str(BadRequest("model " + "x" * 4_000_000 + " does not exist here"))
    assert len(message) < MAX_MESSAGE + 10
    assert message.startswith("model x")
    assert message.endswith("does not exist here")


def test_a_message_can_always_be_encoded() -> None:
    assert str(RequestFailed("boom \ud800")).encode()
