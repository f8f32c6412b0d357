"""The admission rules: what a policy does not admit on a machine, in whole sentences."""

import pytest
from placewise.plans.errors import InputError
from placewise.plans.machine import Accelerator, Malformed, Unmeasurable
from placewise.plans.policy import Hold, Home, Override
from placewise.policies.presets import PRESETS, load_preset, policy_from_json

from .overriding import LARGE, VAE, broken, plan_with
from .questions import (
    GIB,
    accelerator_of,
    cuda,
    fits,
    host_of,
    machine_of,
    mps,
    plan_of,
    policy_of,
)

PAIRS = "device goes with always, the others with phase or layer"
UNKNOWN = Unmeasurable(why="this platform does not tell")


class TestRules:
    def test_compute_device_exists(self) -> None:
        plan = plan_with(Override(select="vae", compute_device="cuda:1"))
        assert broken(plan) == [
            ("compute-device-exists", "vae", "there is no device cuda:1; the machine has cpu, cuda:0")
        ]

    @pytest.mark.parametrize("free", [UNKNOWN, Malformed(source="driver", why="no number")])
    @pytest.mark.parametrize("unified", [False, True], ids=["separate", "unified"])
    def test_device_memory_is_known(self, free: Unmeasurable | Malformed, unified: bool) -> None:  # noqa: FBT001
        device: Accelerator = accelerator_of("xpu:0", free, unified=unified)
        why = "the free memory of xpu:0 was not measured; give it with --device-memory"
        assert broken(plan_with(machine=machine_of(64 * GIB, device))) == [
            ("device-memory-is-known", "transformer", why),
            ("device-memory-is-known", "vae", why),
        ]

    def test_host_memory_is_known_where_copies_are_asked(self) -> None:
        wishes = (
            Override(select="transformer.blocks", home=Home.pageable),
            Override(select="vae", home=Home.device, compute_device="cpu"),
        )
        why = "is a copy on the host, whose available memory was not measured; give it with --host-memory"
        assert broken(plan_with(*wishes, machine=machine_of(host_of(UNKNOWN), cuda(80 * GIB)))) == [
            ("host-memory-is-known", "transformer.blocks", f"home pageable {why}"),
            ("host-memory-is-known", "vae", f"home device {why}"),
        ]

    def test_a_unified_devices_free_memory_tells_the_hosts(self) -> None:
        wish = Override(select="vae", home=Home.pageable)
        fits(plan_with(wish, machine=machine_of(host_of(UNKNOWN), mps(80 * GIB))))

    @pytest.mark.parametrize("home", [Home.pinned, Home.locked])
    def test_home_is_honoured(self, home: Home) -> None:
        assert broken(plan_with(Override(select="vae", home=home))) == [
            ("home-is-honoured", "vae", f"home {home} is not honoured yet; device, pageable, mapped are")
        ]

    @pytest.mark.parametrize(
        ("home", "hold"),
        [(Home.device, Hold.phase), (Home.mapped, Hold.always), (Home.pageable, Hold.always)],
    )
    def test_hold_suits_home(self, home: Home, hold: Hold) -> None:
        why = f"home {home} and hold {hold} contradict each other; {PAIRS}"
        assert broken(plan_with(Override(select="vae", home=home, hold=hold))) == [("hold-suits-home", "vae", why)]

    def test_hold_suits_home_of_a_stack_with_its_components_wish(self) -> None:
        wishes = (
            Override(select="transformer", home=Home.device),
            Override(select="transformer.blocks", hold=Hold.layer),
        )
        why = (
            "home device and hold layer contradict each other; device goes with always, the others with phase or layer"
        )
        assert broken(plan_with(*wishes)) == [("hold-suits-home", "transformer.blocks", why)]

    @pytest.mark.parametrize("hold", [Hold.phase, Hold.layer])
    def test_hold_needs_an_accelerator(self, hold: Hold) -> None:
        wish = Override(select="transformer", hold=hold, compute_device="cpu")
        why = f"hold {hold} needs an accelerator; on the CPU weights are used where they rest"
        assert broken(plan_with(wish)) == [("hold-suits-home", "transformer", why)]

    def test_pageable_on_the_cpu_is_device(self) -> None:
        wish = Override(select="vae", home=Home.pageable, compute_device="cpu")
        why = "home pageable on the CPU is the device's own memory; say home device"
        assert broken(plan_with(wish)) == [("hold-suits-home", "vae", why)]

    def test_all_that_is_broken_is_listed_by_rule_and_subject(self) -> None:
        wishes = (
            Override(select="vae", home=Home.pinned, compute_device="npu:0"),
            Override(select="transformer", home=Home.locked),
        )
        assert [(rule, subject) for rule, subject, _ in broken(plan_with(*wishes))] == [
            ("compute-device-exists", "vae"),
            ("home-is-honoured", "transformer"),
            ("home-is-honoured", "vae"),
        ]

    @pytest.mark.parametrize("rule", load_preset("auto").rules)
    def test_a_policy_cannot_leave_a_rule_out(self, rule: str) -> None:
        rules = tuple(other for other in load_preset("auto").rules if other != rule)
        with pytest.raises(InputError) as caught:
            plan_of(LARGE, VAE, policy=policy_of("auto", rules=rules))
        assert str(caught.value) == (
            f"the policy leaves out the rule '{rule}', without which no plan is sound\nhint: add it to its rules"
        )


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_every_rule_and_their_own_name(preset: str) -> None:
    policy = load_preset(preset)
    assert policy.preset == preset
    assert policy.rules == load_preset("auto").rules
    assert policy.overrides == ()
    assert policy_from_json(policy.model_dump_json()) == policy
