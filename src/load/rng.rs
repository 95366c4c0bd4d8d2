//! Chance that can be repeated: one seed, one course of events.

use std::time::Duration;

/// A small generator (splitmix64); not for secrets.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// The generator of `seed`; `lane` makes independent ones from one seed.
    #[must_use]
    pub fn new(seed: u64, lane: u64) -> Self {
        let mut rng = Self(seed ^ lane.wrapping_mul(0xd134_2543_de82_ef95));
        rng.next_u64();
        rng
    }

    /// 64 fresh bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`; 0 when `end` is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        if end == 0 { 0 } else { self.next_u64() % end }
    }

    /// A number in 0.0..1.0.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A span between two bounds in milliseconds.
    pub fn between_ms(&mut self, bounds_ms: [u64; 2]) -> Duration {
        let [low, high] = bounds_ms;
        Duration::from_millis(low + self.below(high.saturating_sub(low) + 1))
    }

    /// The time to the next event of a Poisson process with this mean distance.
    pub fn exponential(&mut self, mean: Duration) -> Duration {
        mean.mul_f64(-(1.0 - self.unit()).ln())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_seed_is_one_course_and_lanes_differ() {
        let course = |seed, lane| {
            let mut rng = Rng::new(seed, lane);
            [rng.next_u64(), rng.next_u64(), rng.below(10), rng.next_u64()]
        };
        assert_eq!(course(1, 1), course(1, 1));
        assert_ne!(course(1, 1), course(1, 2));
        assert_ne!(course(1, 1), course(2, 1));
        let mut rng = Rng::new(7, 0);
        for _ in 0..1000 {
            assert!(rng.below(3) < 3 && rng.unit() < 1.0);
            assert!((5..=9).contains(&rng.between_ms([5, 9]).as_millis()));
        }
    }
}
