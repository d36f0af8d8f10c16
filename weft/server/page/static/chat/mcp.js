// A server of the Model Context Protocol over streamable HTTP: its tools, and calls of them. It must
// allow pages of this origin (CORS), and weft must be started with its origin (--page-mcp-origins).
// Source: modelcontextprotocol.io, specification 2025-06-18, transports.

import { events } from "../feed.js";

const VERSION = "2025-06-18";
const MOST_PAGES = 20; // of a list of tools

export class McpServer {
	tools = [];
	#id = 0;
	#session = "";
	#version = "";

	constructor(url, key = "") {
		this.url = url;
		this.key = key;
	}

	// Asks for the tools.
	async open() {
		this.#session = "";
		const { protocolVersion } = await this.#ask("initialize", { protocolVersion: VERSION, capabilities: {}, clientInfo: { name: "weft", version: "1" } });
		this.#version = protocolVersion;
		await this.#post({ method: "notifications/initialized" });
		this.tools = [];
		let cursor;
		for (let i = 0; i < MOST_PAGES; i++) {
			const { tools, nextCursor } = await this.#ask("tools/list", cursor ? { cursor } : {});
			this.tools.push(...tools);
			cursor = nextCursor;
			if (!cursor) break;
		}
	}

	// The result of a call as a text.
	async call(name, args) {
		const { content = [], structuredContent, isError } = await this.#ask("tools/call", { name, arguments: args });
		const words = content.map((part) => part.text ?? part.resource?.text ?? `[${part.type}]`).join("\n") || JSON.stringify(structuredContent ?? null);
		return isError ? "error: " + words : words;
	}

	async #ask(method, params) {
		const id = ++this.#id;
		const answer = await this.#post({ id, method, params });
		const { result, error } = await reply(answer, id);
		if (error) throw new Error(`${this.url}: ${error.message}`);
		return result;
	}

	async #post(message) {
		const headers = { "content-type": "application/json", accept: "application/json, text/event-stream" };
		if (this.#session) headers["mcp-session-id"] = this.#session;
		if (this.#version) headers["mcp-protocol-version"] = this.#version;
		if (this.key) headers.authorization = "Bearer " + this.key;
		let answer;
		try {
			answer = await fetch(this.url, { method: "POST", headers, body: JSON.stringify({ jsonrpc: "2.0", ...message }) });
		} catch {
			throw new Error(`${this.url} cannot be reached, or does not allow this page`);
		}
		if (!answer.ok) throw new Error(`${this.url} answered ${answer.status}`);
		this.#session = answer.headers.get("mcp-session-id") || this.#session;
		return answer;
	}
}

async function reply(answer, id) {
	if (!answer.headers.get("content-type")?.startsWith("text/event-stream")) return answer.json();
	for await (const [, data] of events(answer)) {
		const message = JSON.parse(data);
		if (message.id === id) return message;
	}
	throw new Error("the stream has ended without an answer");
}
