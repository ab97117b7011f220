//! Numbers the versions of the drawing. A seed determines a workload only together with the code
//! that draws it. With other weights, another shape, or another order of drawing random numbers,
//! the same seed gives another workload. So the drawing has a number, which every printed command
//! carries, and a seed of another drawing is refused instead of running something else.

/// The digests of all drawings so far, as the test below computes them; the last one is that of
/// this code.
///
/// A change of what is drawn must append the new digest, which the test prints, and must not remove
/// an old one.
const DRAWINGS: &[u64] = &[
    0xc6d5_857a_e4fc_14b4,
    0x93db_79ee_86a1_ecf3,
    0x04a2_25f7_1bb0_7c54,
    0xe13b_21cb_692c_2e89,
    0x4a90_4fb0_3da8_c634,
    0xa382_4211_993e_54e2,
    0x3c67_5ade_d5e4_51ad,
    0x8681_a8b0_49be_2ca5,
    0xbd2e_c7a6_4bcd_6267,
    0x0c44_650b_f5a3_a0b6,
    0x50ca_5332_4582_061b,
    0x76e6_a20f_c627_4980,
    0xe791_c8c6_3b7d_a5da,
    0xfd33_fa78_52f9_f67b,
    0x7610_0374_6634_9849,
    0xd2db_e680_f1b7_feea,
    0x8ee4_bc61_d2df_a820,
    0x8b63_2d65_f6ea_6794,
    0x563b_39df_aeac_adc4,
    0xcdec_1b0c_157a_4d1e,
    0xe98b_7e99_4cbd_d974,
    0x6652_f139_f8b0_104d,
    0xe3dd_dba2_413c_0068,
    0x9293_4664_cad6_a56e,
    0x4252_2efc_c0ab_715b,
    0x5323_8960_ae84_1a39,
    0x4418_9ebd_3adc_1a8d,
    0xc0ce_e81e_80b3_21be,
    0xca9e_c04c_5d05_c451,
    0x4df8_1cc3_fcd0_2252,
    0xff3b_ba8e_12b7_9d14,
    0x133e_8305_0225_e22b,
    0x80ab_49d0_a2db_8ac7,
    0xba53_4289_8b72_a1f0,
];

/// The number of this code's drawing: of what [`Shape::draw`](super::Shape::draw), the rounds of a
/// hunt and the simulated devices derive from a seed.
#[expect(clippy::cast_possible_truncation, reason = "one entry for each change of the drawing")]
pub const DRAWING: u32 = DRAWINGS.len() as u32;

/// The error for a seed of another drawing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "the seed is of drawing {given} and this simulator uses drawing {DRAWING}, which makes another workload from it: build \
     the commit that printed the seed, or run the script that the workload was saved in (sim run --script FILE)"
)]
pub struct DrawingMismatch {
    /// The drawing that the seed belongs to.
    pub given: u32,
}

/// Checks that a seed of drawing `given` can be drawn here.
///
/// # Errors
/// If it would give another workload.
pub const fn check_drawing(given: u32) -> Result<(), DrawingMismatch> {
    if given == DRAWING { Ok(()) } else { Err(DrawingMismatch { given }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::Digest;
    use crate::hunt::HuntRound;
    use crate::run::{rig_for, whole};
    use crate::script::Script;
    use crate::system::System;
    use crate::system::passthrough::Passthrough;
    use crate::workload::{Shape, Workload};
    use std::rc::Rc;

    /// Draws some seeds of all shapes, and some rounds of each kind of one hunt.
    fn drawn() -> Vec<Workload> {
        let shapes = Shape::all().iter().flat_map(|shape| (0..4).map(|seed| shape.draw(seed)));
        shapes.chain((0..300).map(|index| HuntRound::of(1, index).workload)).collect()
    }

    /// Adds all that a script contains, and the steps after a crash.
    fn take_in(digest: &mut Digest, workload: &Workload) {
        digest.bytes(Script::of(workload, &[]).to_string().as_bytes());
        for step in Shape::aftermath(workload, workload.seed, 8) {
            digest.bytes(step.to_string().as_bytes());
        }
    }

    /// Returns the digest of a run on a system that hides nothing of the devices, so that it
    /// changes only with what they derive from a seed.
    fn course(shape: &str) -> u64 {
        let system: Rc<dyn System> = Rc::new(Passthrough);
        let workload = Shape::named(shape).expect("a shape").draw(0);
        let mut rig = rig_for(&system, &workload).expect("nothing grows");
        whole(&mut rig, &workload).expect("no fault");
        let world = rig.world.borrow();
        world.trace.digest()
    }

    #[test]
    fn a_changed_drawing_has_a_new_number() {
        let mut digest = Digest::new();
        ["points", "trouble", "leaving-trouble"].map(course).into_iter().for_each(|sum| digest.word(sum));
        for workload in drawn() {
            take_in(&mut digest, &workload);
        }
        let (now, known) = (digest.value(), DRAWINGS[DRAWINGS.len() - 1]);
        assert!(now == known, "the drawing changed: raise DRAWING by appending {now:#018x} to DRAWINGS");
    }

    #[test]
    fn a_seed_of_another_drawing_is_refused() {
        assert_eq!(check_drawing(DRAWING), Ok(()));
        for given in [0, DRAWING - 1, DRAWING + 1] {
            let refusal = check_drawing(given).unwrap_err().to_string();
            assert!(refusal.contains(&format!("of drawing {given} ")), "{refusal}");
        }
    }
}
