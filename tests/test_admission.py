"""The admission rules: what a policy does not admit on a machine, in whole sentences."""

import pytest
from placewise.plans.errors import InputError
from placewise.plans.machine import Accelerator, Malformed, Unlimited, Unmeasurable
from placewise.plans.policy import Hold, Home, Override
from placewise.plans.units import MIB
from placewise.policies.presets import PRESETS, load_preset, policy_from_json

from .overriding import LARGE, VAE, broken, plan_with
from .questions import (
    GIB,
    accelerator_of,
    component_of,
    cuda,
    fates,
    fits,
    host_of,
    machine_of,
    measured,
    mps,
    plan_of,
    policy_of,
    refused,
    stack_of,
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
        why = "takes memory of the host, whose available memory was not measured; give it with --host-memory"
        assert broken(plan_with(*wishes, machine=machine_of(host_of(UNKNOWN), cuda(80 * GIB)))) == [
            ("host-memory-is-known", "transformer.blocks", f"home pageable {why}"),
            ("host-memory-is-known", "vae", f"home device {why}"),
        ]

    def test_a_unified_devices_free_memory_tells_the_hosts(self) -> None:
        wish = Override(select="vae", home=Home.pageable)
        fits(plan_with(wish, machine=machine_of(host_of(UNKNOWN), mps(80 * GIB))))

    def test_pinned_memory_exists(self) -> None:
        wish = Override(select="vae", home=Home.pinned)
        fits(plan_with(wish))
        assert broken(plan_with(wish, machine=machine_of(64 * GIB, mps(80 * GIB)))) == [
            ("pinned-memory-exists", "vae", "mps has no use for page-locked copies; say home pageable")
        ]
        nothing = policy_of("auto", wish, pinned_max_percent=0)
        why = "the policy auto lets no memory be page-locked; raise its pinned_max_percent"
        assert broken(plan_of(LARGE, VAE, policy=nothing)) == [("pinned-memory-exists", "vae", why)]

    def test_locked_memory_is_known(self) -> None:
        wish = Override(select="vae", home=Home.locked)
        why = "how much memory this process may lock (RLIMIT_MEMLOCK) was not measured; say home mapped"
        assert broken(plan_with(wish)) == [("locked-memory-is-known", "vae", why)]
        host = host_of(measured(64 * GIB), Unlimited(source="RLIMIT_MEMLOCK"))
        fits(plan_with(wish, machine=machine_of(host, cuda(80 * GIB))))

    def test_more_than_may_be_locked_is_refused(self) -> None:
        wish = Override(select="vae", home=Home.locked)
        host = host_of(measured(64 * GIB), measured(MIB))
        verdict = refused(plan_with(wish, machine=machine_of(host, cuda(80 * GIB))))
        assert [(short.axis, short.component, short.have_bytes) for short in verdict.short] == [("locked", "vae", MIB)]

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

    def test_hold_phase_needs_an_accelerator(self) -> None:
        wish = Override(select="transformer", hold=Hold.phase, compute_device="cpu")
        why = "hold phase needs an accelerator; on the CPU weights are used where they rest"
        assert broken(plan_with(wish)) == [("hold-suits-home", "transformer", why)]

    def test_hold_layer_on_the_cpu_is_for_what_is_mapped(self) -> None:
        wish = Override(select="transformer", hold=Hold.layer, home=Home.device, compute_device="cpu")
        why = "hold layer on the CPU reads layers off the disk in turn; with home device they are there always"
        assert broken(plan_with(wish)) == [("hold-suits-home", "transformer", why)]
        fits(plan_with(wish.model_copy(update={"home": Home.mapped})))

    @pytest.mark.parametrize("home", [Home.pageable, Home.pinned])
    def test_copies_on_the_cpu_are_the_devices(self, home: Home) -> None:
        wish = Override(select="vae", home=home, compute_device="cpu")
        why = f"home {home} on the CPU is the device's own memory; say home device"
        assert broken(plan_with(wish)) == [("hold-suits-home", "vae", why)]

    def test_unified_device_is_alone(self) -> None:
        """One that shares the host's memory is used where there is no other, and then by every component."""
        both = machine_of(64 * GIB, mps(40 * GIB), cuda(80 * GIB))
        assert {each.compute_device for each in plan_with(machine=both).placements} == {"cuda:0"}
        why = "mps shares the host's memory, so nothing computes there beside cuda:0"
        wish = Override(select="vae", compute_device="mps")
        assert broken(plan_with(wish, machine=both)) == [("unified-device-is-alone", "vae", why)]
        alone = machine_of(64 * GIB, mps(40 * GIB))
        assert {each.compute_device for each in plan_with(wish, machine=alone).placements} == {"mps"}
        two = machine_of(64 * GIB, mps(40 * GIB), accelerator_of("xpu:0", measured(40 * GIB), unified=True))
        assert {each.compute_device for each in plan_with(machine=two).placements} == {"mps"}

    def test_components_are_layerwise(self) -> None:
        """The rule of the preset that is for video pipelines on Apple silicon; it names each component."""
        on_mps, on_cpu = machine_of(64 * GIB, mps(48 * GIB)), machine_of(64 * GIB)
        names = ("text_encoder", "transformer", "video_vae", "audio_vae")
        parts = [component_of(name, stack_of("blocks", GIB, GIB), fixed=GIB) for name in names]
        plan = plan_of(on_mps, *parts, policy=policy_of("layerwise"))
        for name in names:
            assert fates(plan, name) == ["fixed mapped/phase", "blocks[0:2] mapped/layer"]
        whole = [*parts[:3], component_of("audio_vae", fixed=GIB)]
        kept = (
            Override(select="text_encoder", home=Home.device),
            Override(select="transformer.blocks", hold=Hold.phase),
        )
        rule, say = "components-are-layerwise", "and each must be streamed; say hold layer"
        assert broken(plan_of(on_mps, *whole, policy=policy_of("layerwise", *kept))) == [
            (rule, "audio_vae", "it has no layers that could be streamed"),
            (rule, "text_encoder", f"home device keeps layers on mps, {say}"),
            (rule, "transformer.blocks", f"hold phase keeps layers on mps, {say}"),
        ]
        fits(plan_of(on_mps, *whole, policy=policy_of("auto", *kept)))
        fits(plan_of(on_cpu, *whole, policy=policy_of("layerwise")))

    def test_unknown_activations_are_refused_where_the_policy_says_so(self) -> None:
        told, untold = component_of("vae", fixed=GIB, activations=MIB), component_of("transformer", fixed=GIB)
        careful = policy_of("auto", rules=(*load_preset("auto").rules, "activations-are-known"))
        fits(plan_of(LARGE, told, untold))
        fits(plan_of(LARGE, told, policy=careful))
        ((rule, subject, why),) = broken(plan_of(LARGE, told, untold, policy=careful))
        assert (rule, subject) == ("activations-are-known", "transformer")
        assert "trace it, or give it with --activations" in why

    def test_all_that_is_broken_is_listed_by_rule_and_subject(self) -> None:
        wishes = (
            Override(select="vae", home=Home.pinned, compute_device="npu:0"),
            Override(select="transformer", home=Home.locked),
        )
        assert [(rule, subject) for rule, subject, _ in broken(plan_with(*wishes))] == [
            ("compute-device-exists", "vae"),
            ("pinned-memory-exists", "vae"),
            ("locked-memory-is-known", "transformer"),
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
    more = ("components-are-layerwise",) if preset == "layerwise" else ()
    assert policy.rules == (*load_preset("auto").rules, *more)
    assert policy.overrides == ()
    assert policy_from_json(policy.model_dump_json()) == policy
