"""The model of threats in docs/trust.md: each row has its attack as a test."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "trust.md"
# The beginnings of a row's first two cells, and the tests of its attack; none where nothing stops it.
ATTACKS = """
a stranger who can write your cache folder | put a record
    test_a_folder_that_others_can_write_is_not_loaded_unless_that_is_allowed
    test_files_of_another_user_are_not_loaded
    test_a_shared_folder_with_signatures_beside_is_safe_to_allow
whoever hands you a pack | put any cubin
    test_a_key_outside_the_trust_roots_is_not_enough
    test_a_change_of_one_byte_is_never_loaded
the same, or who runs the registry | hand you an older pack
    test_the_better_record_stays
    test_an_old_signed_record_takes_nothing_back
    test_revoked_records_are_never_loaded
whoever runs the registry | give you another pack
    test_another_pack_than_the_one_that_is_wanted_is_refused
    test_under_signed_unsigned_packs_are_not_pulled
the same | answer without end
    test_no_answer_of_a_registry_is_read_without_bound
    test_no_more_of_a_registry_s_pack_is_taken_than_its_manifest_says
    test_no_more_of_a_web_server_s_pack_is_taken_than_it_says
whoever hands you a cache folder | put links
    test_no_operation_on_the_cache_changes_anything_through_a_link
    test_a_link_that_takes_a_folders_place_at_the_last_moment_is_not_followed
    test_nothing_is_written_or_deleted_through_a_link_in_a_sweep_folder
    test_the_default_place_of_a_sweep_is_not_behind_a_link
    test_a_service_appends_to_no_link
the same | leave an unfinished unpack
    test_other_files_stay_in_incoming_without_an_error
    test_what_another_user_left_in_incoming_is_theirs_to_finish
    test_a_look_at_an_unfinished_unpack_writes_nothing_and_says_it
the same | put a pipe
    test_irregular_files_are_refused_at_once
    test_a_huge_file_takes_no_memory
    test_odd_files_in_shared_places_hold_nobody_up
the same, or whoever hands you a sweep folder | put escape sequences
    test_no_command_prints_what_a_terminal_would_obey
    test_escape_sequences_of_a_folder_are_not_obeyed
the author of another package | bring cubins
    test_the_wheels_own_packs_are_as_trusted_as_its_code_and_those_of_other_packages_are_not
a stranger who plants a sweep folder | have the tuner
    test_a_folder_of_another_user_is_refused
    test_what_is_planted_at_a_default_place_is_not_taken
whoever hands you a sweep folder | the same
    test_what_was_altered_is_compiled_anew
whoever hands you a sweep folder | run a cubin
    test_under_signed_nothing_is_measured_that_nobody_vouches_for
    test_a_carried_folder_is_measured_and_its_records_are_nobodys
the same | have you sign it
    test_the_measurer_does_not_sign_what_a_stranger_compiled
the same | name a file of yours
    test_an_artifact_is_named_by_a_digest_alone
the same | make a slow or wrong kernel win
    test_a_forged_measurement_does_not_count
whoever can read your `seal.key` | seal records
    test_a_secret_that_others_can_read_or_replace_is_not_used
whoever can change your trust roots | add a key
    test_roots_that_others_can_replace_trust_nobody
    test_roots_of_another_user_trust_nobody
a trust root whose key was stolen | sign any cubin
    test_a_removed_trust_root_neither_signs_nor_revokes
a stranger who can write the cache's `quarantine/` | keep candidates
    test_candidates_of_other_problems_and_torn_files_are_left_out
a node of a Ray cluster | return
whoever can write the current folder | have
    test_the_installed_command_runs_nothing_of_the_folder_that_it_is_run_in
whoever can change tilekern | anything
a process that is not a rank | name a leader
    test_a_process_that_is_not_a_rank_cannot_have_ranks_go_on_alone
the same, before the ranks have connected | give them
    test_only_records_that_each_rank_trusts_are_taken_over
a rank that lies | hand out altered
    test_a_record_that_one_rank_does_not_trust_is_a_miss_on_all
 | hand out one record
    test_a_record_has_the_path_that_it_says_and_no_two_share_one
 | hand out an older record
    test_revoked_records_are_never_loaded
 | have a rank compile
    test_the_miss_policy_is_the_strictest
 | say that its GPU
    test_a_malformed_message_ends_all_ranks_with_one_line
 | send malformed data
    test_a_malformed_message_ends_all_ranks_with_one_line
    test_bytes_that_were_changed_give_whole_records_or_an_error
    test_a_head_without_end_is_refused_before_it_is_parsed
a rank that trusts less | make records misses
    test_a_record_that_one_rank_does_not_trust_is_a_miss_on_all
another user or host | hand out records
    test_only_records_that_each_rank_trusts_are_taken_over
a listener | read records
    test_a_seal_is_worth_nothing_to_another_user_or_for_another_record
a fault on the way | leave ranks
    test_ranks_that_hold_other_records_in_the_end_stop
"""


def attacks():
    """The rows of the list with their tests, in its order."""
    found = {}
    for block in re.split(r"\n(?!    )", ATTACKS.strip("\n")):
        row, *names = block.splitlines()
        found[tuple(row.split(" | "))] = [name.strip() for name in names]
    return found


def rows():
    """The first two cells of each row of the tables of who could do what."""
    found, within = [], False
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells[:2] == ["who", "could"]:
            within = True
        elif not cells:
            within = False
        elif within and not cells[0].startswith("---"):
            found.append((cells[0], cells[1]))
    return found


def test_each_row_has_its_attack_and_each_attack_its_row():
    matched = [
        [key for key in attacks() if who.startswith(key[0]) and could.startswith(key[1]) and bool(who) == bool(key[0])]
        for who, could in rows()
    ]
    assert all(len(keys) == 1 for keys in matched), [
        row for row, keys in zip(rows(), matched, strict=True) if len(keys) != 1
    ]
    assert [keys[0] for keys in matched] == list(attacks())


def test_every_attack_is_a_test():
    texts = (path.read_text() for path in TESTS.rglob("test_*.py"))
    functions = {name for text in texts for name in re.findall(r"^def (\w+)", text, re.MULTILINE)}
    assert {name for names in attacks().values() for name in names} <= functions
