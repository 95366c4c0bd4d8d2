//! Places for connections: an index, and a generation so that an old event or timer never meets a new tenant.
//! Rule a change could break: a key that was removed finds nothing, for ever (within 2^32 tenants of a place).

/// Where a tenant lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// The place.
    pub at: u32,
    /// Its tenant's number.
    pub generation: u32,
}

impl Key {
    /// As the 56 low bits of an event's data.
    #[must_use]
    pub fn pack(self) -> u64 {
        u64::from(self.at) << 32 | u64::from(self.generation)
    }

    /// From [`Key::pack`].
    #[must_use]
    pub fn unpack(data: u64) -> Self {
        Self { at: (data >> 32) as u32 & 0x00ff_ffff, generation: data as u32 }
    }
}

struct Place<T> {
    generation: u32,
    tenant: Option<T>,
}

/// The places.
pub struct Slab<T> {
    places: Vec<Place<T>>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    /// No tenant.
    #[must_use]
    pub fn new() -> Self {
        Self { places: Vec::new(), free: Vec::new() }
    }

    /// Tenants.
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Moves one in.
    pub fn insert(&mut self, tenant: T) -> Key {
        self.insert_with(|_| tenant)
    }

    /// Moves one in that is told its key.
    pub fn insert_with(&mut self, tenant: impl FnOnce(Key) -> T) -> Key {
        if let Some(at) = self.free.pop() {
            let place = &mut self.places[at as usize];
            let key = Key { at, generation: place.generation };
            place.tenant = Some(tenant(key));
            return key;
        }
        let at = u32::try_from(self.places.len()).expect("descriptors end long before 2^32");
        let key = Key { at, generation: 0 };
        self.places.push(Place { generation: 0, tenant: Some(tenant(key)) });
        key
    }

    /// The tenant, if it still lives there.
    pub fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let place = self.places.get_mut(key.at as usize)?;
        if place.generation == key.generation { place.tenant.as_mut() } else { None }
    }

    /// Moves one out.
    pub fn remove(&mut self, key: Key) -> Option<T> {
        let place = self.places.get_mut(key.at as usize)?;
        if place.generation != key.generation {
            return None;
        }
        let tenant = place.tenant.take()?;
        place.generation = place.generation.wrapping_add(1);
        self.free.push(key.at);
        Some(tenant)
    }

    /// Every tenant with its key.
    pub fn iter(&self) -> impl Iterator<Item = (Key, &T)> {
        self.places.iter().enumerate().filter_map(|(at, place)| {
            let key = Key { at: at as u32, generation: place.generation };
            place.tenant.as_ref().map(|t| (key, t))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_key_never_finds_the_next_tenant() {
        let mut slab = Slab::new();
        let a = slab.insert("a");
        assert_eq!(Key::unpack(a.pack() | 7 << 56), a);
        assert_eq!(slab.remove(a), Some("a"));
        let b = slab.insert("b");
        assert_eq!(b.at, a.at);
        assert!(slab.get_mut(a).is_none());
        assert!(slab.remove(a).is_none());
        assert_eq!(slab.len(), 1);
        assert_eq!(slab.iter().map(|(k, t)| (k, *t)).collect::<Vec<_>>(), [(b, "b")]);
    }
}
