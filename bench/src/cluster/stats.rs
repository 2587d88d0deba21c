//! Medians and bootstrap intervals of a few runs.

use strake_proto::layout::splitmix64;

pub fn median(values: &[f64]) -> f64 {
    let mut v = values.to_vec();
    v.sort_by(f64::total_cmp);
    match v.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => v[n / 2],
        n => f64::midpoint(v[n / 2 - 1], v[n / 2]),
    }
}

/// 95 % percentile-bootstrap interval of the median (Efron 1979), 2,000 resamples with a fixed
/// seed.
pub fn interval(values: &[f64]) -> (f64, f64) {
    if values.is_empty() {
        return (f64::NAN, f64::NAN);
    }
    let mut state = 1;
    let mut medians: Vec<f64> = (0..2000)
        .map(|_| {
            let n = values.len() as u64;
            let sample: Vec<f64> =
                values.iter().map(|_| values[(splitmix64(&mut state) % n) as usize]).collect();
            median(&sample)
        })
        .collect();
    medians.sort_by(f64::total_cmp);
    (medians[49], medians[1949])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_intervals() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        let (lo, hi) = interval(&[1.0, 2.0, 3.0, 4.0, 100.0]);
        assert!((1.0..=3.0).contains(&lo) && (3.0..=100.0).contains(&hi));
        assert_eq!(interval(&[5.0; 5]), (5.0, 5.0));
    }
}
