// A chat is a tree of messages, of which one path is shown: what is asked or edited again is a
// sibling. Knows neither a browser nor a server.

// The messages from the first one to `leaf`.
export function pathTo(nodes, leaf) {
	const path = [];
	for (let node = nodes.get(leaf); node && path.length <= nodes.size; node = nodes.get(node.parent)) path.unshift(node);
	return path;
}

// The versions of a message, oldest first: those of the same role with the same message before them.
export function versions(nodes, of) {
	return [...nodes.values()].filter((node) => node.parent === of.parent && node.role === of.role).sort((a, b) => a.at - b.at);
}

// The last message below `id`, always by the newest version.
export function newest(nodes, id) {
	for (;;) {
		const below = [...nodes.values()].filter((node) => node.parent === id);
		if (!below.length) return id;
		id = below.reduce((last, node) => (node.at >= last.at ? node : last)).id;
	}
}

// The ids of a message and of all that follow it.
export function below(nodes, id) {
	const found = [id];
	for (const one of found) for (const node of nodes.values()) if (node.parent === one) found.push(node.id);
	return found;
}

const TITLE = 60;

export function titleOf(text) {
	const line = text.trim().split("\n")[0];
	return line.length > TITLE ? line.slice(0, TITLE) + "…" : line || "New chat";
}
