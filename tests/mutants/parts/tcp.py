"""Mutants of csrc/transports/tcp: frames, connections, handshake."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FRAMES = "tests/transports/tcp/test_frames.py::"
HEALS = "tests/transports/tcp/test_reconnect.py::"
HANDSHAKE = "tests/transports/tcp/test_handshake.py"

KILLED = "tests/torch/elastic/test_killed_while_forming.py"
PATHS = "tests/processes/test_paths.py::"
LIMIT = "tests/transports/tcp/test_rate_limit.py::"

MUTANTS = (
    Mutant(
        "all-sockets-where-one-is-enough",
        "comparison",
        "csrc/transports/tcp/channel.cpp",
        "static_cast<size_t>(socket.number) < flow_.sockets(sockets_.size())",
        "true",
        "tests/processes/test_wan.py::test_where_little_is_in_flight_one_socket_carries_it",
    ),
    # ------------------------------------------------------------------ the rate of a path
    Mutant(
        "connections-not-limited",
        "state",
        "csrc/transports/tcp/channel.cpp",
        "limit_rate(socket->sock.get(), limit)",
        "limit_rate(socket->sock.get(), 0)",
        "tests/processes/test_wan.py::test_connections_that_overflow_the_queue_are_limited",
    ),
    Mutant(
        "random-loss-taken-for-a-full-queue",
        "state",
        "csrc/transports/tcp/rate_limit.h",
        "tries_ == kTries",
        "false",
        LIMIT + "test_a_path_that_loses_packets_by_itself_is_not_slowed_down",
    ),
    Mutant(
        "rate-of-a-path-that-has-become-slower-not-followed",
        "state",
        "csrc/transports/tcp/rate_limit.h",
        "lowered_ ? rate : *std::max_element(rates_.begin(), rates_.end())",
        "*std::max_element(rates_.begin(), rates_.end())",
        LIMIT + "test_a_path_that_becomes_slower_is_followed",
    ),
    Mutant(
        "one-window-without-losses-shows-that-a-limit-helps",
        "comparison",
        "csrc/transports/tcp/rate_limit.h",
        "++calm_ >= kCalm",
        "true",
        LIMIT + "test_a_path_that_loses_packets_by_itself_is_not_slowed_down",
    ),
    Mutant(
        "limit-grows-slowly-for-ever",
        "arithmetic",
        "csrc/transports/tcp/rate_limit.h",
        "std::min(2 * step_, kLargestStep)",
        "kFirstStep",
        LIMIT + "test_a_path_that_becomes_faster_is_found",
    ),
    Mutant(
        "one-window-with-losses-is-enough",
        "comparison",
        "csrc/transports/tcp/rate_limit.h",
        "++in_a_row_ == kFirst",
        "++in_a_row_ == 1",
        LIMIT + "test_a_single_window_with_losses_changes_nothing",
    ),
    Mutant(
        "counts-of-new-connections-not-noticed",
        "check",
        "csrc/transports/tcp/rate_limit.h",
        "sent < sent_ || repeated < repeated_",
        "false",
        LIMIT + "test_connections_that_are_made_again_count_from_zero",
    ),
    # ------------------------------------------------------------------ several paths
    Mutant(
        "path-that-is-cut-not-left",
        "wait",
        "csrc/transports/tcp/net/buffers.cpp",
        "info.tcpi_unacked > 0 && info.tcpi_retransmits >= 2",
        "false",
        PATHS + "test_a_path_that_is_cut_is_left_and_used_again",
    ),
    Mutant(
        "sockets-take-the-numbers-of-streams",
        "state",
        "csrc/transports/tcp/net/fd.cpp",
        "beyond_streams(fd)",
        "fd",
        "tests/transports/test_closed_streams.py",
    ),
    Mutant(
        "rates-are-published-with-the-locale's-comma",
        "state",
        "csrc/collectives/group/connect.cpp",
        "decimal_text(rate.send)",
        "std::to_string(rate.send)",
        "tests/processes/test_locales.py",
    ),
    Mutant(
        "path-that-is-back-not-used",
        "order",
        "csrc/transports/tcp/connect/connector.cpp",
        "  outgoing_.back().returns = true;",
        "  outgoing_.pop_back();",
        PATHS + "test_a_path_that_is_cut_before_the_start_is_used_later",
    ),
    Mutant(
        "different-sets-of-paths-taken",
        "check",
        "csrc/transports/tcp/connect/peers.cpp",
        "peer.addresses.size() == directory_.paths()",
        "true",
        PATHS + "test_ranks_with_different_sets_of_paths_get_one_line",
    ),
    # ------------------------------------------------------------------ TCP frames
    Mutant(
        "frame-payload-not-checked",
        "check",
        "csrc/transports/tcp/channel.cpp",
        "crc == expected",
        "true",
        FRAMES + "test_damaged_payload_is_found_and_named",
    ),
    Mutant(
        "frame-checksum-that-follows-not-awaited",
        "order",
        "csrc/transports/tcp/channel.cpp",
        "header.checks == FrameHeader::kNext",
        "false",
        FRAMES + "test_a_message_waits_for_the_checksum_of_its_last_frame",
    ),
    Mutant(
        "frame-that-comes-twice-taken",
        "check",
        "csrc/transports/tcp/channel.cpp",
        "header.length > message.data.size - message.begun || message.done",
        "false",
        FRAMES + "test_frames_never_hold_more_than_their_message",
    ),
    Mutant(
        "frame-of-another-call-taken",
        "check",
        "csrc/transports/tcp/channel.cpp",
        "header.tag_hash != message.tag_hash || header.size != message.data.size",
        "header.size != message.data.size",
        "tests/transports/test_channels.py::test_mismatch_describes_both_calls",
    ),
    Mutant(
        "frame-header-not-checked",
        "check",
        "csrc/transports/tcp/frame.cpp",
        "header.checksum != checksum_of(header)",
        "false",
        FRAMES + "test_damaged_header_is_found",
    ),
    Mutant(
        "frame-beyond-its-message-taken",
        "check",
        "csrc/transports/tcp/frame.cpp",
        "header.length > header.size - header.offset",
        "false",
        FRAMES + "test_false_frame_is_described",
    ),
    Mutant(
        "message-done-before-all-of-it-is-sent",
        "check",
        "csrc/transports/tcp/channel.cpp",
        "message.frames == 0 && place < cutting_",
        "message.frames == 0",
        "tests/transports/test_channels.py "
        "tests/transports/tcp/test_transport.py::test_sockets_share_a_message",
        escapes=(
            "Only a frame shows it whose last bytes, 16 KiB at most, are written alone after "
            "the peer has acknowledged all before them, and that has no checksum."
        ),
    ),
    Mutant(
        "message-done-before-its-checksum-is-sent",
        "order",
        "csrc/transports/tcp/channel.cpp",
        "released(std::exchange(socket.proving, 0))",
        "released(socket.proving)",
        FRAMES + "test_what_is_sent_has_a_checksum_of_every_payload "
        "tests/transports/test_channels.py",
    ),
    Mutant(
        "member-that-dies-while-the-group-is-formed-not-noticed",
        "wait",
        "csrc/transports/tcp/endpoint/endpoint.cpp",
        "if (caller.over && caller.store) caller.store->left(caller.rank);",
        "",
        KILLED,
    ),
    Mutant(
        "silence-of-the-first-member-not-told",
        "wait",
        "csrc/transports/tcp/endpoint/group_formation.cpp",
        "silent_ = late.what();\n      throw Timeout(silence(late), {0});",
        "throw;",
        "tests/torch/elastic/test_reconfigure.py::"
        "test_a_first_member_that_stops_is_named_and_the_group_is_formed_when_it_goes_on",
    ),
    Mutant(
        "acknowledgement-of-what-was-not-sent-taken",
        "check",
        "csrc/transports/tcp/stream.h",
        "if (received > high_) return false;",
        "",
        "tests/transports/tcp/test_frames.py::test_false_frame_is_described",
    ),
    Mutant(
        "kept-bytes-not-continued-at-the-beginning",
        "rank",
        "csrc/transports/tcp/stream.cpp",
        "if (first < bytes) parts[count++] = part(ring_.data(), bytes - first);",
        "",
        HEALS + "test_collectives_go_on_when_connections_are_cut",
        escapes="the ring must wrap inside the bytes that are sent anew after a cut, which takes "
        "64 KiB of unacknowledged small messages: random cuts rarely meet it",
    ),
    # ------------------------------------------------------------------ TCP connections
    Mutant(
        "stream-resumes-where-it-was",
        "rank",
        "csrc/transports/tcp/channel.cpp",
        "socket.out.resume_at(socket.theirs.received);",
        "",
        HEALS + "test_collectives_go_on_when_connections_are_cut",
    ),
    Mutant(
        "torn-frame-is-no-loss",
        "check",
        "csrc/transports/tcp/channel.cpp",
        "torn || over",
        "over",
        "tests/transports/tcp/test_frames.py::"
        "test_a_frame_torn_on_one_of_two_connections_is_a_lost_peer",
    ),
    Mutant(
        "lost-bytes-of-a-quiet-rank-not-repeated",
        "check",
        "csrc/transports/tcp/channel.cpp",
        "resume(outgoing_.empty());",
        "",
        HEALS + "test_what_was_cut_off_is_repeated_by_a_rank_that_communicates_no_more",
    ),
    Mutant(
        "equal-generation-does-not-replace",
        "comparison",
        "csrc/transports/tcp/connect/connector.cpp",
        "hello.generation < state.generation",
        "hello.generation <= state.generation",
        HEALS + "test_what_was_said_on_a_connection_that_stood_for_one_end_alone_is_repeated",
        escapes=(
            "The new connection is closed again, so the peer makes another one, of the next "
            "generation."
        ),
    ),
    Mutant(
        "connection-made-anew-without-a-new-number",
        "constant",
        "csrc/transports/tcp/connect/connector.cpp",
        "broken.generation + 1",
        "broken.generation",
        HEALS + "test_collectives_go_on_when_connections_are_cut",
    ),
    Mutant(
        "requests-of-a-cut-control-connection-lost",
        "state",
        "csrc/transports/tcp/connect/connector.cpp",
        "ask_again(link);",
        "",
        "tests/transports/tcp/test_reconnect.py::"
        "test_a_request_to_connect_that_was_cut_off_is_repeated",
    ),
    Mutant(
        "abort-not-repeated-to-who-does-not-read",
        "state",
        "csrc/transports/tcp/connect/connector.cpp",
        "control_->unsent()",
        "false",
        HEALS + "test_an_abort_reaches_a_rank_that_read_nothing_for_a_while",
    ),
    Mutant(
        "close-not-repeated-on-a-new-connection",
        "state",
        "csrc/transports/tcp/connect/control.cpp",
        "if (leaving_) tell(peer, Message(Message::Kind::close));",
        "",
        HEALS + "test_a_close_that_was_cut_off_is_repeated",
    ),
    Mutant(
        "half-a-notice-continued-on-a-new-connection",
        "state",
        "csrc/transports/tcp/connect/control.cpp",
        "peer.in_done = 0;",
        "",
        HEALS + "test_words_that_were_cut_off_at_the_end_are_repeated",
        within="peer.generation = generation;\n  peer.in_done = 0;",
        escapes="the connection must be cut inside a notice, which one packet carries",
    ),
    Mutant(
        "last-death-named-first",
        "comparison",
        "csrc/transports/tcp/connect/control.cpp",
        "peer->cut_at < first->cut_at",
        "peer->cut_at > first->cut_at",
        "tests/faults/test_lost.py::"
        "test_of_two_that_die_the_first_is_named_by_who_waits_for_the_second",
    ),
    # ------------------------------------------------------------------ TCP set-up
    Mutant(
        "secret-not-compared",
        "check",
        "csrc/transports/tcp/connect/handshake.cpp",
        'equal_digests(message<Digest>(), proof_of("connect"))',
        "true",
        "tests/transports/tcp/test_transport.py::test_wrong_secret_is_refused_and_explained "
        + HANDSHAKE,
    ),
    Mutant(
        "listener-not-asked-for-the-secret",
        "check",
        "csrc/transports/tcp/connect/handshake.cpp",
        'equal_digests(verdict.body, proof_of("listen"))',
        "true",
        HANDSHAKE,
    ),
    Mutant(
        "challenge-not-part-of-the-proof",
        "check",
        "csrc/transports/tcp/connect/handshake.cpp",
        "text.append(reinterpret_cast<const char*>(challenge_.data()), challenge_.size());",
        "",
        HANDSHAKE,
    ),
    Mutant(
        "both-ends-prove-alike",
        "check",
        "csrc/transports/tcp/connect/handshake.cpp",
        'std::string("pycomm tcp ") + role',
        'std::string("pycomm tcp ")',
        HANDSHAKE,
    ),
    Mutant(
        "plain-connection-where-we-encrypt",
        "check",
        "csrc/transports/tcp/connect/handshake.cpp",
        "hello_.tls != static_cast<uint16_t>(tls_)",
        "false",
        "tests/transports/tcp/test_handshake.py::test_refusal_says_why",
    ),
    Mutant(
        "socket-beyond-the-last-accepted",
        "check",
        "csrc/transports/tcp/connect/handshake.cpp",
        "hello_.lane < kLanes && hello_.socket < hello_.sockets",
        "hello_.lane < kLanes",
        HANDSHAKE,
    ),
    Mutant(
        "descriptor-not-closed",
        "state",
        "csrc/transports/tcp/net/fd.cpp",
        "::close(fd);",
        "",
        "tests/transports/tcp/test_transport.py::test_set_up_leaves_no_descriptor_behind",
        within="fds_.erase(fd);\n    ::close(fd);",
    ),
    Mutant(
        "children-keep-connections",
        "state",
        "csrc/transports/tcp/net/fd.cpp",
        "fds_.insert(fd);",
        "",
        "tests/transports/tcp/test_transport.py::test_workers_forked_from_a_rank_do_not_keep_it_alive",
    ),
    Mutant(
        "pacer-does-not-count",
        "state",
        "csrc/transports/tcp/net/pacer.h",
        "tokens_ -= static_cast<double>(part);",
        "",
        "tests/transports/tcp/test_transport.py::test_pacing_holds_the_rate_over_all_peers",
    ),
)
