"""What a policy's overrides ask: what is honoured, what does not fit, and what is no sensible wish."""

import pytest
from placewise.plans.errors import InputError
from placewise.plans.policy import Hold, Home, Override
from placewise.policies.presets import load_preset, policy_from_json

from .overriding import LARGE, TRANSFORMER, VAE, error_of, plan_with
from .questions import (
    GIB,
    component_of,
    cuda,
    decision,
    fates,
    machine_of,
    placement,
    plan_of,
    policy_of,
    refused,
    stack_of,
)


class TestHonoured:
    def test_a_component(self) -> None:
        plan = plan_with(Override(select="transformer", home=Home.mapped))
        assert fates(plan, "transformer") == ["fixed mapped/phase", "blocks[0:2] mapped/phase"]
        assert fates(plan, "vae") == ["fixed device/always"]

    def test_a_stack_alone(self) -> None:
        plan = plan_with(Override(select="transformer.blocks", home=Home.pageable, hold=Hold.layer))
        assert fates(plan, "transformer") == ["fixed device/always", "blocks[0:2] pageable/layer"]

    def test_a_stacks_wish_beats_its_components_field_by_field(self) -> None:
        plan = plan_with(
            Override(select="transformer", home=Home.pageable, hold=Hold.layer),
            Override(select="transformer.blocks", home=Home.mapped),
        )
        assert fates(plan, "transformer") == ["fixed pageable/phase", "blocks[0:2] mapped/layer"]

    def test_hold_layer_leaves_the_fixed_part_its_homes(self) -> None:
        component = component_of("a", stack_of("blocks", GIB, GIB), fixed=GIB)
        layers = Override(select="a", hold=Hold.layer, compute_device="cpu")
        fitting = plan_of(machine_of(64 * GIB), component, policy=policy_of("auto", layers))
        assert fates(fitting, "a") == ["fixed device/always", "blocks[0:2] mapped/layer"]

    @pytest.mark.parametrize(("home", "hold"), [(Home.device, None), (None, Hold.always), (Home.device, Hold.always)])
    def test_at_home_on_the_device_even_under_a_policy_of_little(self, home: Home | None, hold: Hold | None) -> None:
        wish = Override(select="vae", home=home, hold=hold)
        plan = plan_of(LARGE, TRANSFORMER, VAE, policy=policy_of("low-memory", wish))
        assert fates(plan, "vae") == ["fixed device/always"]
        assert fates(plan, "transformer") == ["fixed mapped/phase", "blocks[0:2] mapped/layer"]

    def test_a_compute_device(self) -> None:
        plan = plan_with(Override(select="vae", compute_device="cpu"))
        assert placement(plan, "vae").compute_device == "cpu"
        assert placement(plan, "transformer").compute_device == "cuda:0"
        assert fates(plan, "vae") == ["fixed device/always"]
        assert plan.phases[1].predicted.link_bytes == 0

    def test_a_copy_although_the_policy_makes_none(self) -> None:
        wish = Override(select="vae", home=Home.pageable)
        assert fates(plan_of(LARGE, VAE, policy=policy_of("low-memory", wish)), "vae") == ["fixed pageable/phase"]

    def test_the_decision_says_that_it_was_asked(self) -> None:
        plan = plan_with(Override(select="transformer.blocks", home=Home.mapped))
        why = decision(plan, "transformer.blocks[0:2]")
        assert (why.rule, why.choice) == ("override", "mapped/phase")
        assert [(other.choice, other.why) for other in why.rejected] == [
            ("device/always", "an override asks otherwise")
        ]

    def test_a_hold_that_an_override_keeps_short_is_not_blamed_on_memory(self) -> None:
        plan = plan_with(Override(select="transformer", hold=Hold.layer))
        why = decision(plan, "transformer (fixed)")
        assert (why.rule, why.choice) == ("copy-fits", "pageable/phase")
        assert why.rejected[0].why == "an override asks otherwise"


class TestNeverOverBudget:
    def test_more_on_the_device_than_it_has(self) -> None:
        plan = plan_with(Override(select="transformer", home=Home.device), machine=machine_of(0, cuda(3 * GIB - 1)))
        assert [(one.axis, one.need_bytes, one.have_bytes) for one in refused(plan).short] == [
            ("cuda:0", 4 * GIB, 3 * GIB - 1)
        ]

    def test_more_copies_than_the_host_has(self) -> None:
        plan = plan_with(Override(select="transformer", home=Home.pageable), machine=machine_of(3 * GIB, cuda(8 * GIB)))
        (short,) = refused(plan).short
        assert (short.axis, short.component, short.need_bytes, short.have_bytes) == (
            "host",
            "transformer",
            3 * GIB,
            3 * GIB - 1,
        )

    def test_both_at_once_are_both_named(self) -> None:
        plan = plan_with(
            Override(select="transformer", home=Home.pageable),
            Override(select="vae", home=Home.device),
            machine=machine_of(GIB, cuda(GIB)),
        )
        assert [(one.axis, one.component) for one in refused(plan).short] == [
            ("cuda:0", "transformer"),
            ("host", "transformer"),
        ]
        assert [change.axis for change in refused(plan).nearest] == ["cuda:0", "host"]


class TestErrors:
    @pytest.mark.parametrize(
        ("select", "hint"),
        [
            ("transformer.block", "did you mean transformer.blocks, transformer?"),
            ("tranformer", "did you mean transformer, transformer.blocks?"),
            ("va", "did you mean vae?"),
            ("transformer.blocks.0", "did you mean transformer.blocks, transformer?"),
            ("xyz", "did you mean transformer, transformer.blocks, vae?"),
            ("", "did you mean transformer, transformer.blocks, vae?"),
            ("vae_other", "did you mean vae?"),
        ],
    )
    def test_nothing_of_that_name(self, select: str, hint: str) -> None:
        message = error_of(Override(select=select, home=Home.mapped))
        assert message == f"the override '{select}' matches nothing\nhint: {hint}"

    def test_twice(self) -> None:
        message = error_of(Override(select="vae", home=Home.mapped), Override(select="vae", hold=Hold.phase))
        assert message == "two overrides select 'vae'\nhint: say all in one"

    def test_asks_for_nothing(self) -> None:
        message = error_of(Override(select="vae"))
        assert message == "the override of 'vae' asks for nothing\nhint: give home, hold or device"

    def test_moves_a_stack(self) -> None:
        message = error_of(Override(select="transformer.blocks", compute_device="cpu"))
        assert message == (
            "the override of 'transformer.blocks' moves a stack to cpu\n"
            "hint: a component computes on one device: select 'transformer'"
        )

    def test_streams_what_has_no_layers(self) -> None:
        message = error_of(Override(select="vae", hold=Hold.layer))
        assert message == (
            "the override of 'vae' asks for hold layer, and there are no layers\nhint: ask for hold phase"
        )

    def test_one_selector_for_two_places(self) -> None:
        wish = Override(select="a.b", home=Home.mapped)
        with pytest.raises(InputError) as caught:
            plan_of(
                LARGE, component_of("a", stack_of("b", 1)), component_of("a.b", fixed=1), policy=policy_of("auto", wish)
            )
        assert str(caught.value) == "the override 'a.b' names parts of a, a.b\nhint: select a whole component"

    def test_an_unknown_rule(self) -> None:
        with pytest.raises(InputError) as caught:
            plan_of(LARGE, VAE, policy=policy_of(rules=("compute-device-exists", "be-nice")))
        assert str(caught.value) == (
            "there is no rule 'be-nice'\nhint: rules are compute-device-exists, unified-device-is-alone, "
            "device-memory-is-known, host-memory-is-known, pinned-memory-exists, "
            "locked-memory-is-known, hold-suits-home, components-are-layerwise, activations-are-known"
        )

    def test_an_unknown_preset(self) -> None:
        with pytest.raises(InputError) as caught:
            load_preset("fast")
        assert (
            str(caught.value) == "there is no preset 'fast'\nhint: presets are auto, low-memory, low-latency, layerwise"
        )

    def test_a_policy_with_an_unknown_field(self) -> None:
        text = load_preset("auto").model_dump_json().replace('"slots"', '"slot"')
        with pytest.raises(InputError) as caught:
            policy_from_json(text, source="mine.json")
        assert str(caught.value) == (
            "mine.json: Field required in 'slots' (and 1 more)\nhint: start from the preset auto"
        )
